"""What images, sounds and videos of prompts have in common."""
