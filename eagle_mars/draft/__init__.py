"""Drafting: EAGLE's heads and tree growth. Nothing here knows how drafts are verified."""
