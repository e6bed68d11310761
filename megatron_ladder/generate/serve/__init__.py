"""An OpenAI-compatible server that shares one batch among all requests: `--serve`.

    clients <-HTTP-> app, a thread of rank 0 <-tickets, tokens-> scheduler, rank 0 -step plans-> batch, every rank

A request takes these steps:

    app         receives it and writes the response; `protocol` parses it and builds the JSON of the response
    service     limits and counts requests, and collects the tokens of each request
    scheduler   assigns samples to slots as they become free, and broadcasts each step to all ranks, which run it
"""
