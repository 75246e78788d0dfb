-- ARGV: ttl_ms, batch, eta, total, ahead (groups beyond the durable steps; empty for what eta allows). Returns {ticket, version} or {-reason, version, wake counter, ms to the next lease end}.
local NOT_READY, FULL, EXHAUSTED, LATE_PER_CALL = -1, -2, -3, 16

local function refuse(reason, now)
  local ahead = redis.call('ZRANGEBYSCORE', LEASE, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return { reason, num('version'), num('wake'), ahead[2] and tonumber(ahead[2]) - now or -1 }
end

if redis.call('HGET', ST, 'ready') ~= '1' then return { NOT_READY, num('version'), num('wake'), -1 } end
redis.call('HSET', ST, 'lease_ms', ARGV[1])
local now = now_ms()
local batch, total = tonumber(ARGV[2]), tonumber(ARGV[4])
local cap, version = (tonumber(ARGV[3]) + 1) * batch, num('version')
if ARGV[5] ~= '' then cap = math.min(cap, tonumber(ARGV[5])) end

-- Expired leases return to the pool, so that the lowest ticket is issued again first.
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', LEASE, '(' .. POOL, now, 'LIMIT', 0, LATE_PER_CALL)) do
  redis.call('ZADD', LEASE, ticket, ticket)
end

local ticket = redis.call('ZRANGEBYSCORE', LEASE, '-inf', POOL, 'LIMIT', 0, 1)[1]
if ticket then
  -- Applies only after a rollback to an old checkpoint, when far more tickets than `cap` are lost at once.
  local in_flight = redis.call('XLEN', Q) + redis.call('ZCOUNT', LEASE, '(' .. now, '+inf')
  local ahead = tonumber(ticket) - num('low') - redis.call('SCARD', DONE)
  if in_flight >= cap and ahead > cap then return refuse(FULL, now) end
  redis.call('HINCRBY', ST, 'reissued', 1)
else
  local useful = num('issued') - num('void')
  if useful >= total then return refuse(EXHAUSTED, now) end
  if useful >= version * batch + cap then return refuse(FULL, now) end
  ticket = redis.call('HINCRBY', ST, 'issued', 1)
end
redis.call('ZADD', LEASE, now + tonumber(ARGV[1]), ticket)
return { tonumber(ticket), version }
