"""The real controller under random faults in virtual time: schedules, injection, invariants, exploration, shrinking."""
