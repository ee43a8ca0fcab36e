"""Pure code: no clock, no network, no Redis, no environment."""
