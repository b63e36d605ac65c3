"""`python -m laminar`: the same as the `laminar` command."""

from laminar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
