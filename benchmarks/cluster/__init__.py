"""Emulated cluster: ranks on one machine whose links have a rate for every tier (docs/reports.md)."""
