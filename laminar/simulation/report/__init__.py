"""A study's result for people and programs: terminal, HTML page, JSON."""
