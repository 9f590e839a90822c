"""Host side: readers, tokens, pools, batches, clustering, search; imports layer 1 only."""
