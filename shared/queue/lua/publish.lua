-- ARGV: ticket, payload. Nothing is removed before the entry is in the stream, so a full server loses nothing.
if redis.call('HGET', ST, 'ready') ~= '1' then return 'not_ready' end
local ticket = tonumber(ARGV[1])
if ticket > num('issued') then
  redis.call('HINCRBY', ST, 'strays', 1)
  return 'unknown'
end
local finished = is_finished(ticket)
if finished or redis.call('HEXISTS', SEEN, ticket) == 1 then
  redis.call('ZREM', LEASE, ticket)
  redis.call('HINCRBY', ST, 'duplicates', 1)
  return finished and 'done' or 'duplicate'
end
local entry = redis.call('XADD', Q, '*', 't', ARGV[1], 'd', ARGV[2])
redis.call('HSET', SEEN, ticket, entry)
redis.call('ZREM', LEASE, ticket)
return 'queued'
