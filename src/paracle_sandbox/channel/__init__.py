"""The host's end of the byte stream to the guest: frames, streams and errors."""
