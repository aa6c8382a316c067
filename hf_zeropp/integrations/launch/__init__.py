"""``hf-zeropp launch``: the command and its checks, and how ZeRO++ comes to scripts that do not know this package."""
