"""What a session, its tasks and agents know together: contexts in levels, forked for branches and merged again."""
