"""What users run around the engine. Nothing of the engine imports it."""
