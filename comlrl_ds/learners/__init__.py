"""What is done to engines with data."""
