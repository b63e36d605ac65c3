"""What confines one run of untrusted code: the warden process and the mechanisms of the kernel that it uses.

Standard library only, and little of it: a process is started for every call.
"""
