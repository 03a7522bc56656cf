"""What operators ask of the state; nothing here decides anything."""
