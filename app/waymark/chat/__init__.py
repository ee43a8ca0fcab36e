"""What a chat request says, as far as routing needs it. Pure."""
