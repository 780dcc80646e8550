"""What users send: the traffic profile, its prompts, and the schedule drawn from both."""
