"""What travels between two endpoints: frames, their encoding, limits, handshake and routes (sans-IO)."""
