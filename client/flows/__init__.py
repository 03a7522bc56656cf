"""What a client does, as pure generators that yield the calls and transfers to make."""
