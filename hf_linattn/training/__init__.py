"""Training: options (`arguments`), stages of a recipe (`stages`), losses (`losses`), text and packed rows (`data`)."""
