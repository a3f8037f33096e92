"""State shared by a session, its tasks and their agents: nested contexts that fork into branches and merge."""
