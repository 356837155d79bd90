"""The reference trainer: a Hydra application that trains a GPT-NeoX on text with the stage."""
