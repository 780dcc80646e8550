"""What can be launched, and launching it."""
