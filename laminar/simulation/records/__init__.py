"""What one simulated run leaves behind."""
