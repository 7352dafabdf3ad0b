"""Plug-ins that ship with hal. They are found through the same entry points as anybody's."""
