"""Architectures of Hugging Face under the stage."""
