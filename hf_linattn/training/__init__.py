"""Training: the bundled corpus (`corpus`), text files and packed rows (`data`)."""
