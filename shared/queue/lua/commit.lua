-- ARGV: fence, version or '', void or '', low, then (ticket, entry id or '') pairs. Returns Redis's own low, or -1 if fenced.
-- `low` comes from the checkpoint, so that it repairs a server that lost its last second.
local PER_CALL = 1000
-- A server that lost its last second may know `begin` but not the end of `open_chunk`; nobody else would open it.
if redis.call('HGET', ST, 'fence') ~= ARGV[1] or redis.call('HGET', ST, 'phase') ~= 'open' then return -1 end
local group, low, target = 't' .. ARGV[1], num('low'), tonumber(ARGV[4])
local before = low

for i = 5, #ARGV, 2 do
  clear(ARGV[i], group, ARGV[i + 1])
  local ticket, issued = tonumber(ARGV[i]), num('issued')
  if ticket > low then redis.call('SADD', DONE, ticket) end
  if ticket > math.max(issued, target) then
    -- The server lost the last second, in which it issued the tickets up to this one.
    if ticket - issued > PER_CALL then
      forget()
      return -1
    end
    for lost = issued + 1, ticket - 1 do
      if not is_finished(lost) then redis.call('ZADD', LEASE, lost, lost) end
    end
    redis.call('HSET', ST, 'issued', ticket)
  end
end
for _ = 1, PER_CALL do
  if redis.call('SREM', DONE, low + 1) == 0 then
    if low >= target then break end
    clear(low + 1, group, '')
  end
  low = low + 1
end
redis.call('HSET', ST, 'low', low, 'issued', math.max(num('issued'), low))
if ARGV[2] ~= '' then
  if ARGV[2] ~= redis.call('HGET', ST, 'version') then redis.call('HSET', ST, 'progressed', 1) end
  if #ARGV > 4 or low ~= before or ARGV[2] ~= redis.call('HGET', ST, 'version') or ARGV[3] ~= redis.call('HGET', ST, 'void') then
    wake()
  end
  redis.call('HSET', ST, 'version', ARGV[2], 'void', ARGV[3])
end
return low
