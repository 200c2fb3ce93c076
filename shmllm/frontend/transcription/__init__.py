"""Transcripts of sounds of any length, by models with an encoder for sounds."""
