-- ARGV: fence, entry id, ticket, reason, kept. Copies the entry to the capped stream of poisoned entries; -1 if fenced.
if redis.call('HGET', ST, 'fence') ~= ARGV[1] then return -1 end
local found = redis.call('XRANGE', Q, ARGV[2], ARGV[2])[1]
local payload = ''
if found then
  for i = 1, #found[2], 2 do
    if found[2][i] == 'd' then payload = found[2][i + 1] end
  end
end
redis.call('XADD', DEAD, 'MAXLEN', ARGV[5], '*', 't', ARGV[3], 'reason', ARGV[4], 'd', payload)
return 0
