-- ARGV: ticket, ttl_ms (0 returns the ticket to the pool). Returns 1 while the ticket is still to be published.
if not redis.call('ZSCORE', LEASE, ARGV[1]) then return 0 end
if ARGV[2] == '0' then
  redis.call('ZADD', LEASE, ARGV[1], ARGV[1])
  wake()
else
  redis.call('ZADD', LEASE, now_ms() + tonumber(ARGV[2]), ARGV[1])
end
return 1
