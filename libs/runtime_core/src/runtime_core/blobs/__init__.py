"""Where results lie that are too large to travel: files by URL, in a folder for each task."""
