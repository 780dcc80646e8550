"""From a log to a traffic profile: what the log shows is inferred, what it does not is said."""
