"""What a controller must not forget: written down as it happens, read back when another takes its place."""
