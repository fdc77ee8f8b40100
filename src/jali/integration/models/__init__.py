"""The models jali knows by name, and how they are loaded."""
