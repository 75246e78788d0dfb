-- ARGV: fence, limit, lineage, beginning (both as readers get them). Repairs about `limit` tickets; the position is
-- kept here, so any call may be repeated.
-- Returns 1 when the queue is open, 0 when there is more to do, -1 if fenced.
if redis.call('HGET', ST, 'fence') ~= ARGV[1] then return -1 end
local group, limit = 't' .. ARGV[1], tonumber(ARGV[2])
local phase, cursor = redis.call('HGET', ST, 'phase'), redis.call('HGET', ST, 'cursor')

local function move(next_phase, next_cursor)
  redis.call('HSET', ST, 'phase', next_phase, 'cursor', next_cursor)
  return 0
end

-- Compares entry ids. A damaged id is greater than any other.
local function at_most(a, b)
  local a_ms, a_seq = string.match(a, '(%d+)-(%d+)')
  local b_ms, b_seq = string.match(b, '(%d+)-(%d+)')
  if not (a_ms and b_ms) then return false end
  a_ms, b_ms = tonumber(a_ms), tonumber(b_ms)
  return a_ms < b_ms or (a_ms == b_ms and tonumber(a_seq) <= tonumber(b_seq))
end

if phase == 'open' then return 1 end
if phase == 'queued' then
  -- Queued tickets: finished ones are removed; those that the last incarnation read without any progress are counted.
  local mark, page = redis.call('HGET', ST, 'mark'), redis.call('HSCAN', SEEN, cursor, 'COUNT', limit)
  for i = 1, #page[2], 2 do
    local ticket, entry = page[2][i], page[2][i + 1]
    if is_finished(tonumber(ticket)) then
      clear(ticket, group, entry)
    elseif at_most(entry, mark) then
      redis.call('HINCRBY', TRIES, ticket, 1)
    end
  end
  if page[1] == '0' then return move('leased', 0) end
  return move('queued', page[1])
end
if phase == 'leased' then
  local page = redis.call('ZSCAN', LEASE, cursor, 'COUNT', limit)
  for i = 1, #page[2], 2 do
    if is_finished(tonumber(page[2][i])) then redis.call('ZREM', LEASE, page[2][i]) end
  end
  if page[1] == '0' then return move('lost', num('low')) end
  return move('leased', page[1])
end

-- Issued, but neither finished, queued nor leased: the ticket is lost and returns to the pool.
local issued = num('issued')
local last = math.min(tonumber(cursor) + limit, issued)
for ticket = tonumber(cursor) + 1, last do
  if redis.call('SISMEMBER', DONE, ticket) == 0 and redis.call('HEXISTS', SEEN, ticket) == 0
    and not redis.call('ZSCORE', LEASE, ticket) then
    redis.call('ZADD', LEASE, ticket, ticket)
  end
end
if last < issued then return move('lost', last) end
move('open', 0)
if not whole() or size('XLEN', Q) ~= size('HLEN', SEEN) then
  forget()
  return -1
end
redis.call('HSET', ST, 'lineage', ARGV[3], 'beginning', ARGV[4], 'ready', 1)
wake()
return 1
