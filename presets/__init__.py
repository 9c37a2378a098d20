"""The presets: complete configurations by name, and where their weights are. Imports the standard library only."""
