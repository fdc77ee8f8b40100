"""Clips on disk: opened a few frames at a time, read, written, in whichever form they come."""
