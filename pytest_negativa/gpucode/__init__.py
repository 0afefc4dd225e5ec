"""Bytes of a library to a ``LibraryMap``: host ELF, fatbin regions, bare frames, cubins.

Input is hostile: the readers check every size before they use it, and limit what they unpack.
They report what they don't understand with file and offset, and later stages keep it.
"""
