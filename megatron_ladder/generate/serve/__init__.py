"""An OpenAI-compatible server over the slots of one batch: `--serve`.

    clients  <-HTTP->  app (a thread of rank 0)  <-tickets, tokens->  scheduler (rank 0)  -plans->  worker (every rank)
"""
