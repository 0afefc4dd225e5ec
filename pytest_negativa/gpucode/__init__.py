"""Bytes of a library to a ``LibraryMap``: host ELF, fatbin regions, bare frames, cubins.

Input is hostile: every size is checked before it is used, decompression is bounded, and
whatever is not understood is reported with file and offset and left to be kept.
"""
