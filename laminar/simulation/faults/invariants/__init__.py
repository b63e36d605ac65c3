"""What must hold in every run, whatever fails; `docs/invariants.md` says it in words. One file an invariant."""
