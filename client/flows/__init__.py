"""What a client does, as pure generators: they yield what is to be asked or moved."""
