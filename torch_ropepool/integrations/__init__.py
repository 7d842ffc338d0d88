"""Integrations with other libraries. None is imported before it is asked for."""
