"""From prompts to experience: what is sampled, scored and checked."""
