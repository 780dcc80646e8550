"""Shows studies to people: tables, summaries, the dashboard."""
