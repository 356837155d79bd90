"""The trainer: a Hydra application that trains or fine-tunes a language model with the stage."""
