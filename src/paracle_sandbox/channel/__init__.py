"""The host's end of the byte stream to the guest: frames, streams and errors.

From below: `base` is the byte stream, `frames` the format, `stream` one operation of the guest, and
`connection` runs many of them over one byte stream. `bootstrap` brings the guest into a sandbox.
"""
