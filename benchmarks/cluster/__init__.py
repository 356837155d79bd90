"""Emulated cluster: ranks on one machine whose links have a rate for every tier (README.md beside this file)."""
