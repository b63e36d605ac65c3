"""What confines one run of untrusted code: the warden process and the mechanisms of the kernel that it uses.

Standard library only, and as little of it as can be: a process is started for every call, and importing `json`, `dataclasses`,
`pathlib`, `signal` and the like would cost as much as running the code does.
"""
