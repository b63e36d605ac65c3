"""Many runs: from a study's config to its result, beside the paper's figures."""
