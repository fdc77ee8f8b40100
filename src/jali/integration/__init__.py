"""jali inside other people's pipelines: everything here may import diffusers."""
