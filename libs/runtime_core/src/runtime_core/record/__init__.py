"""What a commit says about its steps."""
